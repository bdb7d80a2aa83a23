"""What happens to every call, one concern each: a layer takes a handler and gives one; `stack` folds them."""
