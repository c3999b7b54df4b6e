"""The report of a training run, one HTML page."""

from raggedmoe.train.report.build import write_report as write_report
