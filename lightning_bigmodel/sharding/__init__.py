"""How states of one model are spread over ranks: ZeRO, tensor parallelism, and optimizers that work on shards."""
