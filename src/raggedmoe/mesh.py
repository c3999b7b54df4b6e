"""The axes of every mesh here, by name, and what is split over which of them."""

DATA, FSDP, EXPERT, TENSOR = "data", "fsdp", "expert", "tensor"
AXES = (DATA, FSDP, EXPERT, TENSOR)
TOKEN_AXES = (DATA, FSDP, EXPERT)  # tokens are split over all of these; tensor ranks see the same tokens
