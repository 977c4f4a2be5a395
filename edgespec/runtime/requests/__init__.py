"""Files of requests: from input.json to output.json, its profile and its checks."""
