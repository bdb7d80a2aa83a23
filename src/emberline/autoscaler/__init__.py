"""The autoscaler: a pure policy that decides how many workers each pool needs, and adapters that start them."""
