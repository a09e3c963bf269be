"""Write a trained model in the formats of other programs, tensor by tensor."""
