"""The reference optimisations: one file per operation, with the eager reference, the kernel, forward and backward.

Every operation is a plain function of tensors. On a GPU it runs the Triton (or CUDA) kernel, elsewhere the eager
reference of the same name; registered with torch.library, so torch.compile and CUDA graphs take it as one op.
"""
