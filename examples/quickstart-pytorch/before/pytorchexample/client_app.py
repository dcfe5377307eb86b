"""The ClientApp: train and evaluate on this node's data."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from pytorchexample.task import Net, load_data
from pytorchexample.task import test as test_fn
from pytorchexample.task import train as train_fn

app = ClientApp()


def load(msg: Message, context: Context):
    """The received model, and the loaders of this node's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    return net, load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on this node's data."""
    net, (trainloader, _) = load(msg, context)
    loss = train_fn(net, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    return Message(content=RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Test the received model on this node's data."""
    net, (_, testloader) = load(msg, context)
    loss, accuracy = test_fn(net, testloader)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(testloader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
