"""The commands of `elastane`: one module for each verb.

`main` finds the verb, runs it, and turns its errors into exit codes. A verb's module has
`configure(parser)` and `main(args) -> int` and imports its work only when it works, so that every
help appears within 0.2 s. Modules with an underscore belong to one verb.
"""
