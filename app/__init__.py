"""The Flower app: server_app, client_app, configuration, results, command line."""
