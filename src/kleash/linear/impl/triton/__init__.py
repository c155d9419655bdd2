"""The backend with Triton kernels. Only ``kernels``, ``arithmetic`` and ``fused`` import triton."""
