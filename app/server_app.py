"""The Flower ServerApp: `flwr run .` starts here."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from app.config import default_run_dir, parse
from app.experiment import run_experiment
from app.rundir import RunDir

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Parse the run keys, run the experiment on Flower's grid, say where the results are."""
    config = parse(context.run_config)
    run_dir = RunDir(config.run_dir or default_run_dir(context.run_id), resume=config.resume)
    summary = run_experiment(config, grid, f"run-{context.run_id}", run_dir)
    if summary["rounds"] and len(list(grid.get_node_ids())) < 3:
        logging.getLogger("flwr.kimad").info(
            "this ran on %d nodes; for ten clients: "
            'flwr run . --stream --federation-config "num-supernodes=10 client-resources-num-cpus=1"',
            len(list(grid.get_node_ids())),
        )
