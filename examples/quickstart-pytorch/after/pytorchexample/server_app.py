"""The ServerApp: start from a fresh model, train for some rounds, test the model after each."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork

from pytorchexample.task import Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of the ServerApp."""
    network = SimulatedNetwork(LinkSettings(uplink_bps_min=4e4, uplink_bps_max=1.2e5))
    strategy = Kimad(Settings(initial_rate_bps=8e4), network)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    print("Metrics of the tests by round:", result.evaluate_metrics_serverapp)


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the model on the images that no node has."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net, load_test_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
