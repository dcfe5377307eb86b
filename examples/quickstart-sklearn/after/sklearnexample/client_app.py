"""The ClientApp: train and evaluate on this node's data."""

import warnings

from clients import kimad_mod
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss

from sklearnexample.task import create_model, get_model_params, load_data, set_model_params

app = ClientApp(mods=[kimad_mod])


def load(msg: Message, context: Context):
    """The received model, and this node's data."""
    model = create_model(context.run_config["local-epochs"])
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())
    return model, load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on this node's data."""
    model, (images, _, labels, _) = load(msg, context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few iterations are all that is wanted
        model.fit(images, labels)
    loss = log_loss(labels, model.predict_proba(images), labels=model.classes_)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    arrays = ArrayRecord(get_model_params(model))
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the received model on this node's data."""
    model, (_, images, _, labels) = load(msg, context)
    loss = log_loss(labels, model.predict_proba(images), labels=model.classes_)
    accuracy = model.score(images, labels)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(labels)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
