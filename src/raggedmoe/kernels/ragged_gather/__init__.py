from raggedmoe.kernels.ragged_gather.api import ragged_gather as ragged_gather
