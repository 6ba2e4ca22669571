"""Several ranks: which part of the model each holds, how they exchange rows, who starts them."""
