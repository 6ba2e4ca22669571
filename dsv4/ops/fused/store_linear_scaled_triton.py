# mypy: ignore-errors
"""`norm_store` whose latent is also stored quantised for the query matrices (sm_100)."""

from dsv4.ops.fused import norm_store_triton
from dsv4.ops.fused.norm_linear_scaled_triton import latent_rows, products, products_reason


def supports(latent, norm, weights, key, blocks) -> str | None:
    return products_reason(latent, weights) or norm_store_triton.supports(latent, norm, key, blocks)


def run(latent, norm, weights, key, blocks):
    rows = latent_rows(latent, weights)
    return products(norm_store_triton.run(latent, norm, key, blocks, rows), weights, rows)
