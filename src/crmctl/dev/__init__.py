"""The embedded environment for laptops, the demo and the tests. Never used in production."""
