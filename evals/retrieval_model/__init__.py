"""A small Llama that retrieves over long contexts: the model that a threshold can hurt.

`python -m blasst.evals.retrieval_model train|damage --help`. Weights are never committed.
"""
