"""The low-rank predictors of active neurons: files, error rates, training.

For an FFN input x [n_embd], layer N scores each neuron with B relu(A x) + b and selects it where
sigmoid(score) > threshold (section 3.1 of the paper, arXiv 2312.11514). `file` and `rates` need
numpy alone; `fit` is the one module that imports torch, and only `train` imports it.
"""
