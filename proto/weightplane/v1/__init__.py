"""The contract: message and service stubs generated from the .proto files beside this one."""
