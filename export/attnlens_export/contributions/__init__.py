"""What each token contributes to a text's embedding: a graph of plain products, exact and without gradients.

With the weights of attention, the deviations of norms and the ratios of activations taken as they are for the
text at hand, an encoder is linear in its embeddings. One sweep back through the same graph then turns a
direction in the space of embeddings into a number for each token; these and a baseline, what the biases give,
add up to the product of the direction and the embedding. See docs/explanations.md for what that means.
"""
