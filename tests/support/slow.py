"""Tests that `make test` leaves to `make test-slow`: whole jobs that take long, and whose like it runs as well.

One of each kind stays: a job on pods, a job by ssh, a job under chaos, each example. CI runs both.
"""

from __future__ import annotations

SLOW = {
    "tests/chaos/test_run.py": ["test_a_job_survives_its_coordinators"],
    "tests/driver/test_trainer.py": ["test_preemptions_are_no_failures"],
    "tests/driver/test_trainer_life.py": ["test_exit_statuses_are_learnt_where_sigchld_was_ignored"],
    "tests/engines/test_kubernetes_driver.py": ["test_a_driver_that_is_killed_is_followed_by_another"],
    "tests/engines/test_kubernetes_engine.py": ["test_a_job"],
    "tests/engines/test_kubernetes_pods.py": [
        "test_coordinators_take_over",
        "test_trainers_are_scaled_and_suspended",
        "test_etcd_with_certificates",
        "test_deleted_and_applied_again",
    ],
    "tests/engines/test_ssh.py": ["test_a_job[sshd]", "test_a_launch_on_machines_that_the_command_line_names"],
    "tests/examples/test_examples.py": ["test_own_loop[s3]"],
    "tests/examples/test_notebook.py": ["test_notebook"],
    "tests/examples/test_skypilot.py": ["test_what_it_runs"],
    "tests/integration/test_checkpoint_age.py": ["test_sync_checkpoints_go_by_age"],
    "tests/integration/test_job_storage.py": [
        "test_a_machine_and_its_etcd_are_lost_and_the_storage_is_s3",
        "test_a_complete_run_stays_and_the_next_one_has_a_storage_of_its_own",
    ],
    "tests/integration/test_models.py": [
        "test_a_model_trains_exactly_while_processes_die[gpt2]",
        "test_a_model_trains_exactly_while_processes_die[llama]",
    ],
    "tests/integration/test_networks.py": ["test_two_hosts_meet_where_etcd_is"],
    "tests/integration/test_no_progress.py": ["test_a_trainer_that_does_not_reach_a_shard_gets_no_work[False]"],
    "tests/integration/test_other_pservers.py": ["test_two_three_one"],
    "tests/integration/test_page.py": ["test_a_trainer_dies_while_somebody_looks"],
    "tests/integration/test_runs.py": ["test_two_users_of_one_etcd_do_not_train_each_others_model"],
    "tests/integration/test_staleness.py": ["test_a_shard_that_comes_back_compensates_again"],
    "tests/integration/test_storage.py": ["test_an_outage_discards_nothing[async]"],
    "tests/integration/test_ways.py": ["test_torchrun_ranks[coordinator]"],
    "tests/interchange/test_reshard.py": ["test_another_machine_knows_by_the_storage_what_a_run_went_on_in[s3]"],
    "tests/loop/test_ranks.py": ["test_all_ranks_go_on_to_the_bit"],
    "tests/page/test_browser.py": ["test_a_job_from_training_to_its_end"],
    "tests/runtime/test_store_kills.py": ["test_at_each_operation[storage]"],
}
"""By file; what is in brackets is one of the test's cases."""


def is_slow(node: str) -> bool:
    """`node`: pytest's name of a test."""
    path, _, name = node.partition("::")
    return name in SLOW.get(path, ())
