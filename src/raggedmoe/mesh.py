"""The axes of every mesh here, by name, and what is split over which of them."""

DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
AXES = (DATA, FSDP, EXPERT, TENSOR)
TOKEN_AXES = (DATA, FSDP, EXPERT)  # tokens are split over all of these; tensor ranks see the same tokens

# The name, for `jax.checkpoint`, of a weight that was gathered to be used: never kept for the backward pass, which
# gathers it again, or every layer's would be there at once.
GATHERED = "gathered_weight"
