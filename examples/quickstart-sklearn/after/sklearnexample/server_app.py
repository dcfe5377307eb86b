"""The ServerApp: start from a model of zeros, train for some rounds, the nodes test it after each."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork

from sklearnexample.task import create_model, get_model_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of the ServerApp."""
    model = create_model(context.run_config["local-epochs"])
    network = SimulatedNetwork(LinkSettings(uplink_bps_min=4e3, uplink_bps_max=8e3))
    strategy = Kimad(Settings(initial_rate_bps=6e3, evaluate="clients"), network)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_model_params(model)),
        num_rounds=context.run_config["num-server-rounds"],
    )
    print("Metrics of the nodes' tests by round:", result.evaluate_metrics_clientapp)
