from raggedmoe.kernels.expert_ffn.api import expert_ffn as expert_ffn
