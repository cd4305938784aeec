"""All that touches DeepSpeed and collectives: engines, optimizers, sharded layers, worlds."""
