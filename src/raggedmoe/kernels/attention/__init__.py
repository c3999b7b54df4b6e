from raggedmoe.kernels.attention.api import attention as attention
