"""The page that is made of a training run."""

from raggedmoe.train.report.build import write_report as write_report
