"""The request log: records of requests, writing them to the store, and their retention."""
