"""The commands, a file each. To add one, add a module here with

    def register(app: App, loader: SettingsLoader) -> None:
        app.command(loader.command(run), name="...")

where `run(loaded: Loaded, ...) -> int` takes the settings (`loaded.settings`) and whatever arguments of its own, and
returns the exit status. Its doc string is the command's help. Import torch, transformers and `engine` inside functions
only.
"""
