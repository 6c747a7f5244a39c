"""`penstock simulate`: what each policy and batch size would do with recorded or synthetic arrivals, without a model."""
