"""Tests that `make test` leaves to `make test-slow`: whole jobs that take long, and whose like it runs as well.

A name stands for all cases of its test. `make test` keeps a dozen whole jobs, and each engine's conformance.
"""

from __future__ import annotations

SLOW = {
    "tests/capture/test_eager.py": ["test_a_job_has_one_fingerprint_until_its_code_changes"],
    "tests/capture/test_models.py": ["test_a_length_that_varies"],
    "tests/capture/test_module_pickle.py": [
        "test_changed_code_has_another_digest",
        "test_code_of_own_modules_goes_with_its_globals",
    ],
    "tests/capture/test_recomputed.py": [
        "test_dropout_between_recurrent_layers[GRU]",
        "test_dropout_between_recurrent_layers[LSTM]",
        "test_gradient_checkpointing_of_transformers[False]",
    ],
    "tests/chaos/test_run.py": [
        "test_a_job_survives_and_ends_with_the_same_bits",
        "test_a_job_survives_its_coordinators",
        "test_a_job_that_hangs_is_reported_with_its_stories",
        "test_what_cannot_be_done",
    ],
    "tests/data/test_randomness.py": ["test_a_watched_read_loads_no_compiler"],
    "tests/data/test_reader.py": ["test_forks_of_user_code_end_when_they_are_told_to"],
    "tests/driver/test_trainer.py": [
        "test_a_failing_worker_exhausts_the_retries_and_its_traceback_is_told",
        "test_a_state_is_saved_loaded_and_replaced",
        "test_all_epochs_that_there_can_be",
        "test_the_driver_is_killed_and_the_script_goes_on",
    ],
    "tests/driver/test_trainer_callbacks.py": [
        "test_a_callback_that_fails_ends_the_processes",
        "test_epochs_of_one_call_are_told_one_by_one",
        "test_events_are_told_up_to_now_and_stay",
    ],
    "tests/driver/test_trainer_life.py": [
        "test_a_failure_is_in_the_status_of_the_folder",
        "test_a_state_is_not_loaded_into_a_run_that_another_script_trains[False]",
        "test_a_state_is_not_loaded_into_a_run_that_another_script_trains[True]",
        "test_another_trainer_of_the_run_takes_over",
        "test_nothing_of_the_processes_is_left",
        "test_one_thread_trains",
    ],
    "tests/driver/test_trainer_state.py": [
        "test_a_checkpoint_that_is_gone_is_trained_again",
        "test_a_damaged_checkpoint_is_no_state_of_the_epoch",
        "test_a_state_that_cannot_be_written_changes_nothing",
        "test_a_state_that_was_loaded_is_not_replaced_by_the_one_before[flipped]",
        "test_a_state_that_was_loaded_is_not_replaced_by_the_one_before[gone]",
        "test_checkpoints_that_are_gone_are_no_beginning[False]",
        "test_checkpoints_that_are_gone_are_no_beginning[True]",
        "test_what_does_not_fit_is_forgotten_nowhere",
    ],
    "tests/driver/test_trainer_steps.py": [
        "test_a_script_that_is_killed_logs_each_step_once",
        "test_an_epoch_whose_script_died_is_told_to_the_next_one_first",
    ],
    "tests/engines/test_kubernetes_engine.py": ["test_a_job"],
    "tests/engines/test_kubernetes_pods.py": ["test_a_job_that_loses_pods_gives_the_same_bits"],
    "tests/engines/test_local.py": ["test_what_holds_for_every_engine[False]"],
    "tests/engines/test_ssh.py": ["test_a_job[sshd]", "test_a_job[stand-in]"],
    "tests/etcd/test_failover.py": ["test_without_a_majority_nothing_is_reported_as_done"],
    "tests/etcd/test_lease.py": ["test_a_frozen_etcd_ends_the_session_in_time"],
    "tests/etcd/test_lease_keeper.py": [
        "test_a_keeper_that_dies_or_is_stopped_is_replaced[60]",
        "test_a_lease_that_somebody_revoked_is_over_at_once[6]",
        "test_a_lock_that_is_held_for_longer_than_the_ttl_loses_nothing",
        "test_a_role_that_is_stopped_loses_its_lease[6]",
    ],
    "tests/etcd/test_lock.py": ["test_a_frozen_holder_that_wakes_writes_nothing[4]"],
    "tests/etcd/test_refusals.py": ["test_a_login_that_expires_is_renewed"],
    "tests/etcd/test_watch.py": ["test_a_frozen_server_is_noticed"],
    "tests/examples/test_examples.py": [
        "test_digits",
        "test_flights",
        "test_linear_regression",
        "test_own_loop",
        "test_tasks",
        "test_tiny_gpt",
        "test_trainer",
    ],
    "tests/examples/test_from_pytorch.py": ["test_the_loop_and_the_job"],
    "tests/examples/test_notebook.py": ["test_notebook"],
    "tests/examples/test_readme.py": ["test_its_script_ends_with_the_same_accuracy_each_time"],
    "tests/integration/test_async.py": ["test_shards_come_back_alone_and_older"],
    "tests/integration/test_bad_lines.py": ["test_many_lines_cost_no_process"],
    "tests/integration/test_bound_to_thread.py": ["test_a_job_reads_it_without_a_failure"],
    "tests/integration/test_fatal_batches.py": ["test_a_record_that_kills_its_reader"],
    "tests/integration/test_faults.py": ["test_a_trainer_that_is_stopped_for_longer_than_its_lease_does_no_harm"],
    "tests/integration/test_fewer_trainers.py": ["test_a_job_goes_on_with_fewer_trainers_than_before"],
    "tests/integration/test_job_storage.py": [
        "test_a_complete_run_stays_and_the_next_one_has_a_storage_of_its_own",
        "test_a_job_that_was_damaged_in_its_storage",
        "test_a_machine_and_its_etcd_are_lost_and_the_storage_is_s3",
        "test_a_storage_that_is_away_is_not_filled_anew",
        "test_of_two_runs_that_take_a_storage_one_has_it",
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
        "test_a_batch_that_always_hangs_is_discarded",
        "test_a_trainer_that_does_not_reach_a_shard_gets_no_work",
        "test_a_trainer_that_hangs_is_ended_and_a_spare_does_its_work",
    ],
    "tests/integration/test_nonfinite.py": [
        "test_skipped_steps_count_for_the_schedule_and_for_nothing_else",
        "test_the_job_stops_there_and_says_the_same_again",
        "test_what_no_loss_shows_ends_the_job_before_it_is_saved",
    ],
    "tests/integration/test_page.py": ["test_a_job_that_is_killed_in_parts_and_as_a_whole"],
    "tests/integration/test_poison.py": [
        "test_a_computation_that_always_fails_ends_the_job_with_its_error",
        "test_a_job_that_would_lose_too_much_data_fails",
    ],
    "tests/integration/test_proof.py": ["test_a_trainer_that_would_give_other_bits_is_refused"],
    "tests/integration/test_randomness.py": ["test_two_runs_of_a_dataset_that_draws_for_some_records"],
    "tests/integration/test_recomputed_jobs.py": ["test_the_bits_do_not_depend_on_who_dies"],
    "tests/integration/test_replay.py": [
        "test_the_state_between_two_checkpoints_is_the_jobs_to_the_bit",
        "test_what_cannot_be_replayed",
    ],
    "tests/integration/test_runs.py": [
        "test_a_model_that_is_gone_is_made_again",
        "test_a_second_launcher_in_a_folder_leaves_it_alone",
        "test_two_users_of_one_etcd_do_not_train_each_others_model",
    ],
    "tests/integration/test_storage.py": ["test_an_outage_discards_nothing"],
    "tests/integration/test_storage_fails.py": [
        "test_a_job_trains_on_while_its_disk_is_full",
        "test_a_job_waits_for_an_etcd_that_is_full",
        "test_an_etcd_that_is_restored_from_an_early_backup",
    ],
    "tests/integration/test_stranger.py": ["test_a_stranger_gets_nothing_and_changes_nothing"],
    "tests/integration/test_validation.py": [
        "test_decisions_are_those_of_the_undisturbed_job",
        "test_held_out_data_that_cannot_be_read_end_the_job",
        "test_it_comes_to_what_the_model_gives_in_one_process",
    ],
    "tests/integration/test_ways.py": [
        "test_by_hand_with_a_cluster_whose_leader_dies",
        "test_the_script_as_each_role_with_an_etcd_that_wants_a_login",
    ],
    "tests/interchange/test_clean.py": [
        "test_of_old_runs_the_newest_and_the_newest_complete_one_stay",
        "test_what_a_complete_job_has_no_use_for",
    ],
    "tests/interchange/test_exported_program.py": [
        "test_open_dimensions_and_several_inputs[tied]",
        "test_open_dimensions_and_several_inputs[transformer]",
        "test_plain_torch_gives_the_bits_of_predict",
    ],
    "tests/interchange/test_job_state.py": [
        "test_slices_are_put_together",
        "test_training_goes_on_with_other_pservers",
    ],
    "tests/interchange/test_optimizer_state.py": [
        "test_torch_goes_on_with_a_job[adamw]",
        "test_torch_goes_on_with_a_job[sgd]",
    ],
    "tests/interchange/test_reshard.py": [
        "test_a_carried_checkpoint_trains_on_to_the_same_bits",
        "test_a_run_goes_on_with_other_pservers",
        "test_more_passes_give_the_bits_of_a_job_that_had_them_from_the_start",
    ],
    "tests/interchange/test_weights.py": ["test_transformers_reads_it"],
    "tests/loop/test_background.py": ["test_a_program_that_ends_has_saved_what_it_began"],
    "tests/loop/test_kills.py": ["test_on_the_disk"],
    "tests/loop/test_loop.py": ["test_torchdatas_loader_goes_on_in_the_middle_of_a_shuffled_epoch[2]"],
    "tests/loop/test_ranks.py": ["test_all_ranks_go_on_to_the_bit"],
    "tests/loop/test_s3.py": ["test_a_loop_goes_on_from_s3"],
    "tests/page/test_browser.py": ["test_a_job_from_training_to_its_end"],
    "tests/prediction/test_predict.py": ["test_the_best_model"],
    "tests/runtime/test_ending.py": ["test_a_signal_that_comes_while_the_last_callbacks_are_told_is_one_line"],
    "tests/runtime/test_forgotten_close.py": ["test_a_process_that_forgets_to_close_anything_ends"],
    "tests/runtime/test_fork_server.py": [
        "test_a_fork_server_that_dies_is_passed_over",
        "test_a_job_that_cannot_be_loaded_fails_before_any_role_starts",
        "test_a_role_is_this_processs_child_and_outlives_the_fork_server",
        "test_roles_and_fork_server_die_with_the_launcher",
        "test_roles_are_forked_and_their_ends_are_told",
        "test_what_a_killed_fork_server_has_not_told_of_is_killed_with_it",
    ],
    "tests/runtime/test_lease_loss.py": [
        "test_a_daemon_thread_that_dies_takes_the_process_along",
        "test_a_daemon_thread_that_hangs_is_noticed_by_the_loop",
        "test_a_process_without_etcd_ends_before_its_lease_can_have",
    ],
    "tests/runtime/test_proof.py": ["test_onednn_uses_what_the_job_says_whatever_the_environment_does"],
    "tests/runtime/test_status_command.py": ["test_a_job_that_was_never_begun_stopped_or_is_complete"],
    "tests/runtime/test_store_kills.py": ["test_at_each_operation[storage]"],
    "tests/runtime/test_supervisor.py": ["test_a_lease_is_revoked_when_etcd_is_back"],
    "tests/sim/test_sim.py": ["test_more_seeds[async]", "test_more_seeds[sync]"],
    "tests/transpiler/test_job.py": ["test_hash_is_stable_across_processes"],
    "tests/transpiler/test_numeric.py": [
        "test_bits_do_not_depend_on_the_number_of_shards[tied]",
        "test_bits_do_not_depend_on_the_number_of_shards[transformer]",
        "test_bits_with_slices_of_the_default_size",
        "test_buffers_and_random_numbers_in_one_slot[gru]",
        "test_buffers_and_random_numbers_in_one_slot[resnet]",
    ],
    "tests/transpiler/test_prediction.py": [
        "test_by_default_it_is_what_the_model_returns_in_the_loss[gpt2]",
        "test_by_default_it_is_what_the_model_returns_in_the_loss[transformer]",
    ],
}
"""By file; what is in brackets is one of the test's cases."""


def is_slow(node: str) -> bool:
    """True if pytest calls a slow test so."""
    path, _, name = node.partition("::")
    names = SLOW.get(path, ())
    return name in names or name.partition("[")[0] in names
