"""The config file: fields, decoding, overrides, presets."""
