"""Models in Hugging Face form: config.json and safetensors, in and out."""
