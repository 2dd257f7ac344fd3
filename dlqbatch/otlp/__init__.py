"""OpenTelemetry: what a run has done, pushed once when it ends. The SDK is loaded only where an endpoint is set."""
