"""Tools of agent loops: functions, objects with state, MCP servers, and a sandbox for programs."""
