"""What is set on a task for the pods of its job: it goes to the workers, not to the step that launches them."""

from kfp.dsl import TaskConfigField, TaskConfigPassthrough

FOR_WORKERS = [
    TaskConfigPassthrough(field=TaskConfigField.KUBERNETES_NODE_SELECTOR),
    TaskConfigPassthrough(field=TaskConfigField.KUBERNETES_TOLERATIONS),
    TaskConfigPassthrough(field=TaskConfigField.KUBERNETES_AFFINITY),
    TaskConfigPassthrough(field=TaskConfigField.KUBERNETES_VOLUMES),
    # The step's own. kfp wants every field that is used to be listed once one is.
    TaskConfigPassthrough(field=TaskConfigField.RESOURCES, apply_to_task=True),
    TaskConfigPassthrough(field=TaskConfigField.ENV, apply_to_task=True),
]
