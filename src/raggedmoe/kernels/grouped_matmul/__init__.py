from raggedmoe.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
