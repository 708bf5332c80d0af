"""How whole-model replicas agree."""
