"""Keeps the progress bars and notices of transformers off the log; imported for that alone.  [shell]"""

import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
