//! Items of migrations in the kernel of this host, and names that its agent has to change.

use api::{Client, MigrationId, NetworkItem, NetworkState, OpenNames, StandingRedirection, VmName};

use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// `whimbrel net show`.
pub(crate) fn show(client: &Client, output: &Output) -> Result<Code, Failure> {
    output.show(&client.network()?, text);
    Ok(Code::Done)
}

/// `whimbrel net release`.
pub(crate) fn release(client: &Client, vm: &VmName, all: bool, output: &Output) -> Result<Code, Failure> {
    output.show(&client.release_network(vm, all)?, |released: &Vec<MigrationId>| {
        let mut text = Text::default();
        for migration in released {
            text.line(format_args!("ended the redirection of {migration} on this host"));
        }
        text.finish()
    });
    Ok(Code::Done)
}

fn text(state: &NetworkState) -> String {
    let mut text = Text::default();
    if !state.redirections.is_empty() {
        let heading = ["REDIRECTION", "VM AT", "LEFT", "ADDRESSES", "TUNNEL", "CONNECTIONS", "STAGE", "AGE"];
        text.append(&table(heading, state.redirections.iter().map(redirection_row)));
        text.line(format_args!(""));
    }
    if state.items.is_empty() {
        text.line(format_args!("no migration has anything in the kernel of this host"));
    } else {
        let heading = ["MIGRATION", "AGE", "KIND", "NAME", "INTERFACES", "STANDING"];
        text.append(&table(heading, state.items.iter().map(row)));
    }
    for item in &state.items {
        if let Some(advice) = &item.advice {
            text.line(format_args!("{}: {advice}", item.name));
        }
    }
    if !state.names.is_empty() {
        text.append(&table(["MIGRATION", "NAME", "STANDING"], state.names.iter().flat_map(name_rows)));
    }
    for unread in &state.unread {
        text.line(format_args!("{unread}"));
    }
    text.finish()
}

fn redirection_row(redirection: &StandingRedirection) -> [String; 8] {
    let words = |words: Vec<String>| words.join(" ");
    [
        redirection.migration.to_string(),
        redirection.at.to_string(),
        words(redirection.left.iter().map(ToString::to_string).collect()),
        words(redirection.addresses.iter().map(ToString::to_string).collect()),
        redirection.tunnel.clone().unwrap_or_else(|| "-".to_owned()),
        redirection.connections.map_or_else(|| "-".to_owned(), |count| count.to_string()),
        redirection.stage.name().to_owned(),
        age(redirection.age_s),
    ]
}

fn row(item: &NetworkItem) -> [String; 6] {
    [
        item.migration.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
        item.age_s.map_or_else(|| "-".to_owned(), age),
        item.kind.name().to_owned(),
        item.name.clone(),
        item.interfaces.join(" "),
        item.standing.name().to_owned(),
    ]
}

fn name_rows(open: &OpenNames) -> impl Iterator<Item = [String; 3]> {
    let row = move |record: &api::NameRecord| {
        [open.migration.to_string(), record.to_string(), record.detail.clone()]
    };
    open.changes.records.iter().map(row)
}

/// Formats an age in its largest unit.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_kernel_and_an_unread_one_differ() {
        let empty = text(&NetworkState::default());
        assert_eq!(empty, "no migration has anything in the kernel of this host\n");
        let unread = NetworkState { unread: vec!["no tables: denied".to_owned()], ..NetworkState::default() };
        assert_eq!(text(&unread), empty + "no tables: denied\n");
    }

    #[test]
    fn ages_have_one_unit() {
        let ages = [119, 120, 7199, 7200, 172_799, 172_800].map(age);
        assert_eq!(ages, ["119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]);
    }
}
