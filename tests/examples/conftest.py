"""The environment in which tests start Flower, taken from the test of `flwr run`."""

from tests.app.test_flower import environment as environment
