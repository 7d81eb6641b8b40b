//! `whimbrel forecast`.

use api::{Client, ForecastRequest};

use crate::Code;
use crate::cli::ForecastCommand;
use crate::failure::Failure;
use crate::forecast_text;
use crate::migration::request;
use crate::output::Output;

/// Forecasts a migration, or shows the record of forecasts.
pub(crate) fn run(client: &Client, command: ForecastCommand, output: &Output) -> Result<Code, Failure> {
    let (Some(vm), Some(to)) = (command.vm, command.to) else {
        output.show(&client.calibration()?, forecast_text::calibration);
        return Ok(Code::Done);
    };
    let migration = request(vm, to, command.request);
    let forecast = client.forecast(&ForecastRequest { migration, fresh: command.fresh })?;
    output.show(&forecast, forecast_text::forecast);
    Ok(Code::Done)
}
