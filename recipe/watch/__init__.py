"""Who a rank is, the control store, and the supervision that ends a run for a reason it names."""
