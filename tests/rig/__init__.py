"""
What tests are run on.

- `deployment`: processes, servers and the app in `scripted`, whose handlers do what a document asks for.
- `history`: what has happened, as a list of facts, and the checks of the promises over it.
"""
