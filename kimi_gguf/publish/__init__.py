"""Publishing on the Hub: layout, model card, proof, resumable upload, and conversions that upload as they go."""
