"""What both training loops stand on; each module needs only those above it.

process      a script's process: its logging, its errors and its end
determinism  PyTorch's settings, seeds, and the states of random generators
watch        processes that hang end the run
distributed  how processes find each other; barriers, gathers and sums
launch       an attempt knows that a launcher has started the run before
locks        sole use of a folder
output       a run's output folder, for all of its processes
resume       what a run resumes from: checked when it is read
ddp          a model on several processes
precision    float32, bfloat16 and float16
optimizer    AdamW, and what decays
curves       learning curves as a picture
estimate     what a run takes, before it begins
"""
