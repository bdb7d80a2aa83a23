"""KV tiers: places that keep KV blocks after they were evicted from the main cache.

The tiers are host memory, disk, and a store that several workers share.
"""
