"""Write a trained model in the formats of other tools, tensor by tensor."""
