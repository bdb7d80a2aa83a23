"""What a request used, and what that costs: tokens, prices, bills."""
