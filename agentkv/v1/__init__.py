"""Generated from protos/agentkv/v1/agentkv.proto by `make protos`; not to be edited."""
