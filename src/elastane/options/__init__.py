"""The options of `elastane run`: from command line, environment and settings file to one checked
`AgentConfig`.

`options.TABLE` lists every option once. `parser` reads the command line, `settings` the file;
`build` checks everything before any process starts. Each error names the option, its value, where
it came from, and what to write instead.
"""
