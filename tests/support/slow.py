"""Tests that `make test` leaves to `make test-slow`: whole jobs that take long, and whose like it runs as well.

A name stands for all cases of its test. `make test` keeps a dozen whole jobs, and each engine's conformance.
"""

from __future__ import annotations

SLOW = {
    "tests/chaos/test_run.py": [
        "test_a_job_survives_its_coordinators",
        "test_a_job_that_hangs_is_reported_with_its_stories",
    ],
    "tests/driver/test_trainer.py": [
        "test_a_trainer_that_was_asked_to_leave_is_replaced_and_a_trainers_job_needs_its_script",
        "test_passes_that_are_asked_for_without_a_script_are_trained_and_no_others",
        "test_preemptions_are_no_failures",
        "test_the_driver_is_killed_and_the_script_goes_on",
    ],
    "tests/driver/test_trainer_callbacks.py": ["test_what_an_interrupted_call_wanted_is_not_trained"],
    "tests/driver/test_trainer_life.py": [
        "test_a_failure_is_in_the_status_of_the_folder",
        "test_a_forked_child_does_not_hold_the_run",
        "test_a_state_is_not_loaded_into_a_run_that_another_script_trains[False]",
        "test_a_state_is_not_loaded_into_a_run_that_another_script_trains[True]",
        "test_epochs_that_another_process_trained_meanwhile_count",
        "test_exit_statuses_are_learnt_where_sigchld_was_ignored",
    ],
    "tests/driver/test_trainer_state.py": [
        "test_a_state_that_cannot_be_written_changes_nothing",
        "test_a_full_disk_changes_nothing",
        "test_a_script_that_begins_meanwhile_is_told_of",
        "test_a_state_that_was_loaded_is_not_replaced_by_the_one_before[flipped]",
        "test_a_state_that_was_loaded_is_not_replaced_by_the_one_before[gone]",
        "test_another_machine_knows_that_there_was_a_checkpoint",
        "test_checkpoints_that_are_gone_are_no_beginning[False]",
        "test_no_state_takes_the_place_of_a_damaged_one",
    ],
    "tests/driver/test_trainer_steps.py": [
        "test_a_job_without_a_trainer_tells_its_callbacks",
        "test_a_script_that_is_killed_logs_each_step_once",
        "test_an_epoch_whose_script_died_is_told_to_the_next_one_first",
    ],
    "tests/engines/test_kubernetes_driver.py": ["test_a_driver_that_is_killed_is_followed_by_another"],
    "tests/engines/test_kubernetes_engine.py": [
        "test_a_job",
        "test_a_launcher_that_comes_after_a_dead_one_ends_its_pods",
        "test_closing_ends_what_waits_for_room",
    ],
    "tests/engines/test_kubernetes_pods.py": [
        "test_a_job_that_loses_pods_gives_the_same_bits",
        "test_coordinators_take_over",
        "test_deleted_and_applied_again",
        "test_etcd_with_certificates",
        "test_trainers_are_scaled_and_suspended",
    ],
    "tests/engines/test_local.py": ["test_what_holds_for_every_engine[False]"],
    "tests/engines/test_ssh.py": [
        "test_a_job[sshd]",
        "test_a_job[stand-in]",
        "test_a_launch_on_machines_that_the_command_line_names",
        "test_a_signal_reaches_the_role",
        "test_what_holds_for_this_machine_without_ssh",
    ],
    "tests/examples/test_examples.py": [
        "test_digits",
        "test_flights",
        "test_own_loop",
        "test_tasks",
        "test_tiny_gpt",
        "test_trainer",
    ],
    "tests/examples/test_from_pytorch.py": ["test_the_loop_and_the_job"],
    "tests/examples/test_notebook.py": ["test_notebook"],
    "tests/examples/test_readme.py": ["test_its_script_ends_with_the_same_accuracy_each_time"],
    "tests/examples/test_skypilot.py": ["test_what_it_runs"],
    "tests/integration/test_async.py": [
        "test_shards_come_back_alone_and_older",
        "test_a_shard_that_does_not_answer_is_skipped_and_made_good",
    ],
    "tests/integration/test_bad_lines.py": ["test_many_lines_cost_no_process"],
    "tests/integration/test_bound_to_thread.py": ["test_a_job_reads_it_without_a_failure"],
    "tests/integration/test_checkpoint_age.py": ["test_async_shards_take_theirs_by_age"],
    "tests/integration/test_fatal_batches.py": ["test_a_record_that_kills_its_reader"],
    "tests/integration/test_faults.py": ["test_a_trainer_that_is_stopped_for_longer_than_its_lease_does_no_harm"],
    "tests/integration/test_fewer_trainers.py": ["test_a_job_goes_on_with_fewer_trainers_than_before"],
    "tests/integration/test_job_storage.py": [
        "test_a_machine_and_its_etcd_are_lost_and_the_storage_is_s3",
        "test_a_complete_run_stays_and_the_next_one_has_a_storage_of_its_own",
        "test_another_storage_is_another_run",
        "test_of_two_runs_that_take_a_storage_one_has_it",
        "test_of_two_machines_that_begin_at_once_the_later_one_finds_the_run_of_the_other",
        "test_a_storage_that_is_away_is_not_filled_anew",
        "test_a_job_that_was_damaged_in_its_storage",
    ],
    "tests/integration/test_loading.py": [
        "test_a_dataset_that_takes_longer_to_construct_than_a_lease_lasts",
        "test_a_trainer_that_loads_ends_with_its_job_or_when_it_is_told_to",
    ],
    "tests/integration/test_local_steps.py": ["test_trainers_and_shards_are_killed_and_leave"],
    "tests/integration/test_metrics.py": [
        "test_a_unit_of_local_steps_is_the_mean_over_the_samples_of_its_batches",
        "test_the_status_has_the_newest_values",
    ],
    "tests/integration/test_models.py": ["test_a_model_trains_exactly_while_processes_die"],
    "tests/integration/test_networks.py": ["test_two_hosts_meet_where_etcd_is"],
    "tests/integration/test_no_progress.py": [
        "test_a_trainer_that_hangs_is_ended_and_a_spare_does_its_work",
        "test_a_batch_that_always_hangs_is_discarded",
        "test_a_trainer_that_does_not_reach_a_shard_gets_no_work",
    ],
    "tests/integration/test_nonfinite.py": [
        "test_skipped_steps_count_for_the_schedule_and_for_nothing_else",
        "test_the_job_stops_there_and_says_the_same_again",
        "test_async_batches_are_discarded_once_on_every_shard",
        "test_a_warning",
        "test_what_no_loss_shows_ends_the_job_before_it_is_saved",
    ],
    "tests/integration/test_other_pservers.py": ["test_two_three_one"],
    "tests/integration/test_page.py": ["test_a_job_that_is_killed_in_parts_and_as_a_whole"],
    "tests/integration/test_poison.py": [
        "test_a_job_that_would_lose_too_much_data_fails",
        "test_a_computation_that_always_fails_ends_the_job_with_its_error",
    ],
    "tests/integration/test_proof.py": ["test_a_trainer_that_would_give_other_bits_is_refused"],
    "tests/integration/test_randomness.py": ["test_two_runs_of_a_dataset_that_draws_for_some_records"],
    "tests/integration/test_recomputed_jobs.py": ["test_the_bits_do_not_depend_on_who_dies"],
    "tests/integration/test_replay.py": ["test_the_state_between_two_checkpoints_is_the_jobs_to_the_bit"],
    "tests/integration/test_runs.py": [
        "test_two_users_of_one_etcd_do_not_train_each_others_model",
        "test_a_model_that_is_gone_is_made_again",
        "test_a_launch_that_finds_no_etcd_says_so_in_one_message",
    ],
    "tests/integration/test_staleness.py": ["test_nothing_staler_than_allowed_is_applied"],
    "tests/integration/test_storage.py": ["test_an_outage_discards_nothing"],
    "tests/integration/test_storage_fails.py": [
        "test_an_etcd_that_is_restored_from_an_early_backup",
        "test_a_job_waits_for_an_etcd_that_is_full",
        "test_a_job_trains_on_while_its_disk_is_full",
    ],
    "tests/integration/test_stranger.py": ["test_a_stranger_gets_nothing_and_changes_nothing"],
    "tests/integration/test_task_loop.py": ["test_a_sync_jobs_tasks_are_its_slots"],
    "tests/integration/test_validation.py": [
        "test_a_script_that_is_killed_tells_each_validation_once",
        "test_held_out_data_that_cannot_be_read_end_the_job",
        "test_decisions_are_those_of_the_undisturbed_job",
    ],
    "tests/integration/test_ways.py": [
        "test_by_hand_with_a_cluster_whose_leader_dies",
        "test_the_script_as_each_role_with_an_etcd_that_wants_a_login",
    ],
    "tests/interchange/test_clean.py": ["test_what_a_complete_job_has_no_use_for"],
    "tests/interchange/test_exported_program.py": [
        "test_open_dimensions_and_several_inputs[tied]",
        "test_open_dimensions_and_several_inputs[transformer]",
        "test_plain_torch_gives_the_bits_of_predict",
    ],
    "tests/interchange/test_job_state.py": [
        "test_a_checkpoint_says_what_it_is_of_and_where_in_the_data[False]",
        "test_a_checkpoint_without_a_manifest_is_told[False]",
        "test_training_goes_on_with_other_pservers",
    ],
    "tests/interchange/test_optimizer_state.py": ["test_torch_goes_on_with_a_job[sgd]"],
    "tests/interchange/test_reshard.py": [
        "test_more_passes_give_the_bits_of_a_job_that_had_them_from_the_start",
        "test_what_differs_in_more_is_another_run[batch_size]",
        "test_what_differs_in_more_is_another_run[passes]",
        "test_what_differs_in_more_is_another_run[seed]",
    ],
    "tests/loop/test_ranks.py": ["test_all_ranks_go_on_to_the_bit"],
    "tests/page/test_browser.py": ["test_a_job_from_training_to_its_end"],
    "tests/prediction/test_predict.py": ["test_the_best_model"],
    "tests/runtime/test_cli.py": ["test_output_into_a_closed_pipe"],
    "tests/runtime/test_environment.py": [
        "test_a_rank_so_late_that_the_job_ends_under_it_ends_well[spec]",
        "test_a_rank_so_late_that_the_job_ends_under_it_ends_well[trainers]",
    ],
    "tests/runtime/test_fork_server.py": [
        "test_a_fork_server_that_is_not_needed",
        "test_a_job_that_cannot_be_loaded_fails_before_any_role_starts",
        "test_a_stopped_fork_server_is_killed_and_its_orders_are_carried_out_without_it",
    ],
    "tests/runtime/test_lease_loss.py": ["test_a_daemon_thread_that_dies_takes_the_process_along"],
    "tests/runtime/test_proof.py": ["test_onednn_uses_what_the_job_says_whatever_the_environment_does"],
    "tests/runtime/test_stale_run.py": ["test_a_launcher_in_another_pid_namespace_revokes_nobodys_lease"],
    "tests/runtime/test_store_kills.py": ["test_at_each_operation[storage]"],
    "tests/sim/test_sim.py": ["test_more_seeds[async]", "test_more_seeds[sync]"],
    "tests/transpiler/test_numeric.py": [
        "test_bits_do_not_depend_on_the_number_of_shards[tied]",
        "test_bits_do_not_depend_on_the_number_of_shards[transformer]",
        "test_buffers_and_random_numbers_in_one_slot[gru]",
        "test_buffers_and_random_numbers_in_one_slot[resnet]",
        "test_models_that_were_not_written_for_this[bert]",
        "test_models_that_were_not_written_for_this[gpt2]",
    ],
    "tests/transpiler/test_prediction.py": ["test_by_default_it_is_what_the_model_returns_in_the_loss[bert]"],
}
"""By file; what is in brackets is one of the test's cases."""


def is_slow(node: str) -> bool:
    """True if pytest calls a slow test so."""
    path, _, name = node.partition("::")
    names = SLOW.get(path, ())
    return name in names or name.partition("[")[0] in names
