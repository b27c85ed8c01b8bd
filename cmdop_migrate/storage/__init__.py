"""Store immutable objects by name: the Store interface, its backends (directory, S3, memory) and wrappers (retry, rate
limit). It may import `util` and the base modules (errors, log, clock). boto3 and botocore are imported only here and in
lease/s3*.py."""
